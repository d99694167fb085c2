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
INSERT INTO "budgets" VALUES(1,'notes','patient','add-or-remove-one',8.0,1.0e-05,4.0,'2026-11-21T08:27:20.714+00:00');
INSERT INTO "budgets" VALUES(2,'synthetic-notes',NULL,NULL,NULL,NULL,9e999,'2026-11-21T08:27:20.757+00:00');
CREATE TABLE datasets (
	name VARCHAR(200) NOT NULL, 
	budget_id INTEGER NOT NULL, 
	registered_at VARCHAR(40) NOT NULL, 
	PRIMARY KEY (name), 
	FOREIGN KEY(budget_id) REFERENCES budgets (id)
);
INSERT INTO "datasets" VALUES('notes',1,'2026-11-21T08:27:20.721+00:00');
INSERT INTO "datasets" VALUES('synthetic-notes',2,'2026-11-21T08:27:20.757+00:00');
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
	settled_at VARCHAR(40) NOT NULL, 
	PRIMARY KEY (number), 
	UNIQUE (dataset, spec_hash, attempt), 
	UNIQUE (id), 
	FOREIGN KEY(budget_id) REFERENCES budgets (id), 
	FOREIGN KEY(dataset) REFERENCES datasets (name)
);
INSERT INTO "entries" VALUES(1,'23d879c19bcd1fc58c6a6413931f6330',1,'notes','patient','{"count":1,"kind":"gaussian","noise_multiplier":2.0,"unit":"patient","version":1}',1.0e-06,'training',0,'settled','run-1',0,'dp_bert/run-1','cecdc85a99359dfb0d3d24741ab32c2e','798401f5fd1d3424a845270f5f0d29a4:cd10c166a43936d7f402746f568f90464ce566c5a75e5cdbee406e96410f5b55','c815c99d3c980c84dce675075454ac1e3eaf13d81beafe9849fc43edb534d015',0,'2026-11-21T08:27:20.802+00:00','2026-11-21T08:27:20.887+00:00');
INSERT INTO "entries" VALUES(2,'d649c6e0aec9c1de896f1a2cb8f5609f',1,'notes','patient','{"kind":"thresholded_histogram","mechanism":"set-counts","noise":"discrete-gaussian","sigma":80.0,"threshold":600,"unit":"patient","version":1,"words_per_unit":64}',1.0e-06,'vocabulary',0,'reserved','run-1',0,'dp_bert/run-1','57504e1d41cacf1f3c78de0e694dda7d','','',0,'2026-11-21T08:27:20.934+00:00','');
INSERT INTO "entries" VALUES(3,'aacbd32bf690f050010436219deee962',1,'notes','patient','{"kind":"unaccounted","reason":"non-private training","unit":"patient","version":1}',0.0,'nonprivate',0,'settled','',0,'','3d56c6ac1197cd57bca539beb35e1287','','',0,'2026-11-21T08:27:20.983+00:00','2026-11-21T08:27:21.022+00:00');
CREATE TABLE ledger_schema (
	version INTEGER NOT NULL
);
INSERT INTO "ledger_schema" VALUES(1);
CREATE INDEX ix_entries_budget_id ON entries (budget_id);
COMMIT;
