"""Output of the builder: HTML pages, one file each without scripts or external files, and text for terminals."""
