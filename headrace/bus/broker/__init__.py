"""The broker: a nats-server of our own, its accounts, keys, clusters and regions."""
