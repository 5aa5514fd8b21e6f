"""The consumer loop: a member of a consumer group that opens, feeds and commits the tasks it is assigned."""
