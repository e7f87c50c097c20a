"""Reports: runs compared on a page, in pictures, CSV files and tables."""
