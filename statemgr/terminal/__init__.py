"""What commands share: options, output, and the files that they write for people. Knows no operation."""
