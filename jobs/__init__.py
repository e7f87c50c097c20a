"""Entry points: training, reports, launching. They run from the checkout and are not installed."""
