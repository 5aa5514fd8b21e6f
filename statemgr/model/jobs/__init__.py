"""What the checkpoint topic says of a whole job, besides its checkpoints. Pure."""
