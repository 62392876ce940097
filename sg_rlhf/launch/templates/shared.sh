{# What several job files have. -#}
{% macro header(job) %}
# {{ job.recipe }} on {{ job.machines }}. Printed by
#   {{ job.printed_by }}
{% if job.estimate %}
# From sg-rlhf plan: {{ job.estimate }}.
{% endif %}
{% endmacro %}
{% macro limits() %}
# Raise the limits: Ray opens one file per connection (65536 are enough), CUDA and InfiniBand pin memory.
ulimit -S -n "$(ulimit -H -n)"
ulimit -S -l "$(ulimit -H -l)"
{%- endmacro %}
{# Ray on the machines of a job that runs the same commands on each. `head`: a shell expression for the first machine's
   address; `rank`: the variable with a machine's number; `options`: more words for `ray start`. -#}
{% macro ray_nodes(job, head, rank, options="") %}
  head={{ head }}
  start=(ray start --block --disable-usage-stats{{ options }})
  start+=(--num-gpus={{ job.ranks }} --num-cpus={{ job.cpus }})
  if [ "${{ rank }}" != 0 ]; then
    for _ in {1..150}; do
      if ray health-check --address "$head:6379" >/dev/null 2>&1; then break; fi
      sleep 2
    done
    "${start[@]}" --address "$head:6379" || echo "Ray ended here, as it does when the run has"
    exit 0                         # the first machine reports the run's status
  fi
  "${start[@]}" --head --node-ip-address "$head" --port 6379 &
  trap 'kill %1 2>/dev/null || true' EXIT
  export RAY_ADDRESS=$head:6379
  # The run waits until all machines are there (sg.cluster_wait).
{% endmacro %}
