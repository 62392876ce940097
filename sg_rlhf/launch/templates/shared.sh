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
