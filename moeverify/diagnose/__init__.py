"""From findings to cause and place: which linear combination of the golden's parts a wrong gradient is, and why."""
