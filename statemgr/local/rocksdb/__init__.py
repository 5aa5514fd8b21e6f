"""RocksDB, through rocksdict."""
