"""`oktopk-bench`: measures the links between ranks and hosts, and steps over them."""
