"""One file a picture of a case, drawn by matplotlib. Nothing of this is imported before a picture is written."""
