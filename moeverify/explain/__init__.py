"""Why a step differs: operators are recorded, aligned with those of one device, and executed with changes."""
