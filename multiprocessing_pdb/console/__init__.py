"""The console: one prompt for all stopped ranks of a job."""
