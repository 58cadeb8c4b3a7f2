"""What the README and the pages of docs/ say is what there is: every block, link and table."""
