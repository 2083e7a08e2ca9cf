"""One logical step: clip, sum, add noise, lift, update."""
