"""The blob stores on Google Cloud Storage and Azure Blob Storage, through their REST interfaces."""
