"""Reports: tables and progress in a terminal, HTML pages, SVG plots."""
