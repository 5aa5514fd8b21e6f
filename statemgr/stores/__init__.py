"""The stores of a task, as its application reads and writes them."""
