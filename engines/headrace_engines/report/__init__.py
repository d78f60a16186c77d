"""What is shown of engines: pages and plots in one file each, without scripts and without anything fetched."""
