"""Adapters of a query's vector: learnt from traces, measured on repositories held out, published as versions."""
