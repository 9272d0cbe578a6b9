"""Parts of the report: traces checked, counted and compared, then written as one page."""
