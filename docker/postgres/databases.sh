# Sourced once, when the server's volume is empty: a database and a user for each that needs one.
# It may run again on a server that is at work (docs/operate.md, Upgrade): it adds what is missing,
# and sets the passwords that it is given.
# The ledger's user can reach the ledger alone; beside its reader, nobody else can reach it.
ask() {
  psql -v ON_ERROR_STOP=1 -q -U "$POSTGRES_USER" -d postgres "$@"
}
for name in airflow mlflow ledger ledger_reader; do
  variable="$(echo "$name" | tr '[:lower:]' '[:upper:]')_DATABASE_PASSWORD"
  ask -v name="$name" -v password="$(printenv "$variable")" <<'SQL'
SELECT format('CREATE ROLE %I LOGIN', :'name')
 WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = :'name') \gexec
ALTER ROLE :"name" PASSWORD :'password';
SQL
done
for pair in airflow:airflow mlflow:mlflow mlflow_auth:mlflow ledger:ledger; do
  ask -v name="${pair%:*}" -v owner="${pair#*:}" <<'SQL'
SELECT format('CREATE DATABASE %I OWNER %I', :'name', :'owner')
 WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = :'name') \gexec
REVOKE ALL ON DATABASE :"name" FROM PUBLIC;
SQL
done
# For steps that read files from outside: they look into the ledger, and cannot write.
ask <<'SQL'
ALTER ROLE ledger_reader SET default_transaction_read_only = on;
GRANT CONNECT ON DATABASE ledger TO ledger_reader;
\connect ledger
GRANT SELECT ON ALL TABLES IN SCHEMA public TO ledger_reader;
ALTER DEFAULT PRIVILEGES FOR ROLE ledger IN SCHEMA public GRANT SELECT ON TABLES TO ledger_reader;
SQL
