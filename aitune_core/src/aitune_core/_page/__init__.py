"""A report as one HTML file. Needs the extra ``report``; nothing here is imported before."""
