"""What becomes of the results: tables, files, pages and figures."""
