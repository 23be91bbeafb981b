"""Stage 0, population. In: a data set's name. Out: a Federation: training clients, validation clients, test data."""

from fedblur.data.population import Federation, Packed, Population, Samples, Shard

__all__ = ["Federation", "Packed", "Population", "Samples", "Shard"]
