"""Pictures of cases drawn with matplotlib, one module each; imported only when a picture is written."""
