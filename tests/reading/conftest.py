from wds_datapipes.reading.repairs import apply

apply()  # before a test module imports torchdata: that would show its banner, and a warning is an error here
