"""Attribution: scores of training rows for queries, from captures."""
