"""What steps log, and what they give the loggers, on ranks that each see a part of a batch."""
