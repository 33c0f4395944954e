"""The NATS client: connection, consumers, ordered readers, key-value buckets."""
