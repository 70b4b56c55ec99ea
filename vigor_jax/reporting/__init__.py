"""From run folders to figures, a verdict and a page."""
