"""What tests of other packages may import."""
