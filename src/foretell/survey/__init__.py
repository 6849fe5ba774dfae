"""Everything a page on a step shows: timelines, diagnosis, advice, plans; for report and studio."""
