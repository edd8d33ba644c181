"""One seeded training run: data, loss, optimizer, clipping, under any layout."""
