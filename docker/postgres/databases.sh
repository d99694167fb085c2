# Creates a database and a user for each service that needs one. PostgreSQL's image sources this file
# once, when the server's volume is empty. The script may run again on a running server
# (docs/operate.md, Upgrade): it adds missing users and databases, and sets the passwords from the
# environment.
# The ledger's user can connect to the ledger only. Apart from it, only the ledger's reader can connect
# to the ledger.
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
# The user for steps that read files from outside: it can read the ledger, and cannot write.
ask <<'SQL'
ALTER ROLE ledger_reader SET default_transaction_read_only = on;
GRANT CONNECT ON DATABASE ledger TO ledger_reader;
\connect ledger
GRANT SELECT ON ALL TABLES IN SCHEMA public TO ledger_reader;
ALTER DEFAULT PRIVILEGES FOR ROLE ledger IN SCHEMA public GRANT SELECT ON TABLES TO ledger_reader;
SQL
