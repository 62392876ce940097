# Raise the limits: Ray opens one file per connection (65536 are enough), CUDA and InfiniBand pin memory.
ulimit -S -n "$(ulimit -H -n)"
ulimit -S -l "$(ulimit -H -l)"
