BEGIN TRANSACTION;
CREATE TABLE budgets (
	id INTEGER NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	unit VARCHAR(20), 
	relation VARCHAR(40), 
	epsilon DOUBLE, 
	delta DOUBLE, 
	renyi_order DOUBLE NOT NULL, 
	opened_at VARCHAR(40) NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (name)
);
INSERT INTO "budgets" VALUES(1,'notes','patient','add-or-remove-one',8.0,1.0e-05,4.0,'2026-11-22T21:43:37.482+00:00');
INSERT INTO "budgets" VALUES(2,'synthetic-notes',NULL,NULL,NULL,NULL,9e999,'2026-11-22T21:43:37.525+00:00');
CREATE TABLE datasets (
	name VARCHAR(200) NOT NULL, 
	budget_id INTEGER NOT NULL, 
	registered_at VARCHAR(40) NOT NULL, 
	PRIMARY KEY (name), 
	FOREIGN KEY(budget_id) REFERENCES budgets (id)
);
INSERT INTO "datasets" VALUES('notes',1,'2026-11-22T21:43:37.484+00:00');
INSERT INTO "datasets" VALUES('synthetic-notes',2,'2026-11-22T21:43:37.526+00:00');
CREATE TABLE entries (
	number INTEGER NOT NULL, 
	id VARCHAR(32) NOT NULL, 
	budget_id INTEGER NOT NULL, 
	dataset VARCHAR(200) NOT NULL, 
	unit VARCHAR(20) NOT NULL, 
	event TEXT NOT NULL, 
	delta DOUBLE NOT NULL, 
	spec_hash VARCHAR(128) NOT NULL, 
	attempt INTEGER NOT NULL, 
	state VARCHAR(20) NOT NULL, 
	plan_key VARCHAR(300) NOT NULL, 
	whole_plan BOOLEAN NOT NULL, 
	run VARCHAR(300) NOT NULL, 
	seed_key VARCHAR(128) NOT NULL, 
	seed_hash VARCHAR(200) NOT NULL, 
	manifest_hash VARCHAR(128) NOT NULL, 
	known_seed BOOLEAN NOT NULL, 
	reserved_at VARCHAR(40) NOT NULL, 
	settled_at VARCHAR(40) NOT NULL, withdrawn_at VARCHAR(40) NOT NULL DEFAULT '', released_hash VARCHAR(128) NOT NULL DEFAULT '', 
	PRIMARY KEY (number), 
	UNIQUE (dataset, spec_hash, attempt), 
	UNIQUE (id), 
	FOREIGN KEY(budget_id) REFERENCES budgets (id), 
	FOREIGN KEY(dataset) REFERENCES datasets (name)
);
INSERT INTO "entries" VALUES(1,'27224746552aa4800ccd8e675dd5342b',1,'notes','patient','{"count":1,"kind":"gaussian","noise_multiplier":2.0,"unit":"patient","version":1}',1.0e-06,'training',0,'settled','dp_bert/run-1',1,'dp_bert/run-1','4326173d8d1d74839cbb87789b5188ba','65197eb5f3e867472e327e1ab8585436:a5435a8ae37bd0ee75651c9f2bbcf079a9120bae617eab9ae43be9c44d55f88a','6d82044f314885bbc5535408e722f96a68755aafbddfeae696ee96fd6d87bc34',0,'2026-11-22T21:43:37.806+00:00','2026-11-22T21:43:37.884+00:00','','dacbdf6cafa35fa8042518fedae6fe112ccfdbe34c7e9f89b67f61801c5b4a7c');
INSERT INTO "entries" VALUES(2,'7b34ba638821e801af1ab1ceeed0ff8e',1,'notes','patient','{"kind":"thresholded_histogram","mechanism":"set-counts","noise":"discrete-gaussian","sigma":80.0,"threshold":600,"unit":"patient","version":1,"words_per_unit":64}',1.0e-06,'vocabulary',0,'reserved','dp_bert/run-1',1,'dp_bert/run-1','e5d6ac863534c31a6dd7dacfa4675134','','',0,'2026-11-22T21:43:37.929+00:00','','','');
INSERT INTO "entries" VALUES(3,'fc79d7dcbe82dfc18080acb99bb260d1',1,'notes','patient','{"kind":"unaccounted","reason":"non-private training","unit":"patient","version":1}',0.0,'nonprivate',0,'settled','',0,'','71b0657d50348f4e0953b027abffe11f','','',0,'2026-11-22T21:43:37.968+00:00','2026-11-22T21:43:38.028+00:00','','');
INSERT INTO "entries" VALUES(4,'001c8ba469fc0fec47637df2b3c083e8',1,'notes','patient','{"candidates":[{"count":1,"kind":"gaussian","noise_multiplier":2.0,"unit":"patient","version":1},{"count":1,"kind":"gaussian","noise_multiplier":4.0,"unit":"patient","version":1}],"count":"truncated-negative-binomial","delta":1e-06,"eta":1.0,"gamma":0.25,"kind":"random_count_selection","mean":0.0,"unit":"patient","version":1}',1.0e-06,'selection',0,'withdrawn','dp_sweep/run-2',1,'dp_sweep/run-2','d62712230e9d6488dcda89761b74d9b6','','',0,'2026-11-22T21:43:38.093+00:00','','2026-11-22T21:43:38.136+00:00','');
CREATE TABLE ledger_identity (id VARCHAR(32) NOT NULL);
INSERT INTO "ledger_identity" VALUES('da95e1d3defb9f20d4282d84076b9018');
CREATE TABLE ledger_schema (
	version INTEGER NOT NULL
);
INSERT INTO "ledger_schema" VALUES(3);
CREATE INDEX ix_entries_budget_id ON entries (budget_id);
CREATE TABLE private_sources (
            digest VARCHAR(64) NOT NULL,
            dataset VARCHAR(200) NOT NULL REFERENCES datasets (name),
            read_at VARCHAR(40) NOT NULL,
            PRIMARY KEY (digest, dataset)
        );
INSERT INTO "private_sources" VALUES('2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e','notes','2026-11-22T21:39:18.019+00:00');
CREATE TABLE public_sources (
            digest VARCHAR(64) NOT NULL PRIMARY KEY,
            label VARCHAR(200) NOT NULL,
            declared_at VARCHAR(40) NOT NULL,
            known_private BOOLEAN NOT NULL
        );
INSERT INTO "public_sources" VALUES('1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f1f','wiki','2026-11-22T21:39:17.981+00:00',0);
INSERT INTO "public_sources" VALUES('2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e2e','notes','2026-11-22T21:39:18.052+00:00',1);
COMMIT;
