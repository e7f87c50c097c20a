"""`oktopk-plan`: which settings pay on a network, predicted."""
