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
INSERT INTO "budgets" VALUES(1,'notes','patient','add-or-remove-one',8.0,1.0e-05,4.0,'2026-11-21T11:17:26.713+00:00');
INSERT INTO "budgets" VALUES(2,'synthetic-notes',NULL,NULL,NULL,NULL,9e999,'2026-11-21T11:17:26.720+00:00');
CREATE TABLE datasets (
	name VARCHAR(200) NOT NULL, 
	budget_id INTEGER NOT NULL, 
	registered_at VARCHAR(40) NOT NULL, 
	PRIMARY KEY (name), 
	FOREIGN KEY(budget_id) REFERENCES budgets (id)
);
INSERT INTO "datasets" VALUES('notes',1,'2026-11-21T11:17:26.715+00:00');
INSERT INTO "datasets" VALUES('synthetic-notes',2,'2026-11-21T11:17:26.721+00:00');
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
	settled_at VARCHAR(40) NOT NULL, withdrawn_at VARCHAR(40) NOT NULL DEFAULT '', 
	PRIMARY KEY (number), 
	UNIQUE (dataset, spec_hash, attempt), 
	UNIQUE (id), 
	FOREIGN KEY(budget_id) REFERENCES budgets (id), 
	FOREIGN KEY(dataset) REFERENCES datasets (name)
);
INSERT INTO "entries" VALUES(1,'0f80c5d2dcf5cf4ef585cbc7902de38d',1,'notes','patient','{"count":1,"kind":"gaussian","noise_multiplier":2.0,"unit":"patient","version":1}',1.0e-06,'training',0,'settled','dp_bert/run-1',1,'dp_bert/run-1','d0a90e3ad83a25be6b24441497cf10e1','3e7fd3d4813f32c4f14985426ea21f2a:24283cc62920d52d534bacc56a3e67b0edb8e70ae664b9c85c0837e7af0a56ec','149fdbdbff512cc8cdfcba8bb59f6dc3fb87dfa0a7e72e1b02a251a92437039a',0,'2026-11-21T11:17:26.806+00:00','2026-11-21T11:17:26.821+00:00','');
INSERT INTO "entries" VALUES(2,'a7b0e874a5263c0302ce6f65f7c25d47',1,'notes','patient','{"kind":"thresholded_histogram","mechanism":"set-counts","noise":"discrete-gaussian","sigma":80.0,"threshold":600,"unit":"patient","version":1,"words_per_unit":64}',1.0e-06,'vocabulary',0,'reserved','dp_bert/run-1',1,'dp_bert/run-1','a3fd69c7efd51f0a68ff2b2a42539d73','','',0,'2026-11-21T11:17:26.829+00:00','','');
INSERT INTO "entries" VALUES(3,'2c8fc5f26e0eaae6667a48866e45b001',1,'notes','patient','{"kind":"unaccounted","reason":"non-private training","unit":"patient","version":1}',0.0,'nonprivate',0,'settled','',0,'','a56b89bb31ff64d6c20fb1363695692e','','',0,'2026-11-21T11:17:26.837+00:00','2026-11-21T11:17:26.843+00:00','');
INSERT INTO "entries" VALUES(4,'3de4081d1a3a66bcfbee59eeefdbf535',1,'notes','patient','{"candidates":[{"count":1,"kind":"gaussian","noise_multiplier":2.0,"unit":"patient","version":1},{"count":1,"kind":"gaussian","noise_multiplier":4.0,"unit":"patient","version":1}],"count":"truncated-negative-binomial","delta":1e-06,"eta":1.0,"gamma":0.25,"kind":"random_count_selection","mean":0.0,"unit":"patient","version":1}',1.0e-06,'selection',0,'withdrawn','dp_sweep/run-2',1,'dp_sweep/run-2','db0e5a89e7d11a9eb0ff738266c9dbe3','','',0,'2026-11-21T11:17:26.853+00:00','','2026-11-21T11:17:26.860+00:00');
CREATE TABLE ledger_schema (
	version INTEGER NOT NULL
);
INSERT INTO "ledger_schema" VALUES(2);
CREATE INDEX ix_entries_budget_id ON entries (budget_id);
COMMIT;
