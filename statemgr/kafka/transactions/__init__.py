"""Transactions: the producer that has a transactional ID, who may publish with it, and what a broker refuses."""
