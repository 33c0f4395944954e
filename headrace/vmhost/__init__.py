"""Sandboxes: guest image, template snapshot, copy-on-write clones with slots, and the agent inside the guest.

`host.Host` is the surface that actors use; everything below it knows neither tasks nor policies.
"""
