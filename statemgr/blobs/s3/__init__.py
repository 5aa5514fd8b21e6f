"""The blob store on S3 and servers that speak its protocol."""
