"""Row sets that many processes write under leases."""
