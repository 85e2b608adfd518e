"""Reports: tables, plots and pages of results."""
