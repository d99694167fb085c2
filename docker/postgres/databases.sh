# Sourced once, when the server's volume is empty: a database and a user for each that needs one.
# The ledger's user can reach the ledger alone, and nobody else can reach it.
for name in airflow mlflow ledger; do
  variable="$(echo "$name" | tr '[:lower:]' '[:upper:]')_DATABASE_PASSWORD"
  psql -v ON_ERROR_STOP=1 -q -U "$POSTGRES_USER" -d postgres \
    -v name="$name" -v password="$(printenv "$variable")" <<'SQL'
CREATE ROLE :"name" LOGIN PASSWORD :'password';
CREATE DATABASE :"name" OWNER :"name";
REVOKE ALL ON DATABASE :"name" FROM PUBLIC;
SQL
done
psql -v ON_ERROR_STOP=1 -q -U "$POSTGRES_USER" -d postgres <<'SQL'
CREATE DATABASE mlflow_auth OWNER mlflow;
REVOKE ALL ON DATABASE mlflow_auth FROM PUBLIC;
SQL
