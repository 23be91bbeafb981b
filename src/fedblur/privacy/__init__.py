"""All that an epsilon rests on: sampling, events, accountants, the ledger, clipping, noise."""
