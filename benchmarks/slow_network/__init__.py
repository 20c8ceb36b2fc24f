"""A small cluster on one machine: ranks in network namespaces, joined by slow links."""
