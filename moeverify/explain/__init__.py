"""Why a step differs: its operators are recorded, aligned with those of one device, and causes proven by execution."""
