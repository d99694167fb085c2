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
INSERT INTO "budgets" VALUES(1,'notes','patient','add-or-remove-one',8.0,1.0e-05,4.0,'2026-11-22T21:26:53.202+00:00');
INSERT INTO "budgets" VALUES(2,'ward','document','add-or-remove-one',6.0,1.0e-05,9e999,'2026-11-22T21:26:53.218+00:00');
INSERT INTO "budgets" VALUES(3,'epochs','example','zero-out-one',12.0,1.0e-05,3.0,'2026-11-22T21:26:53.227+00:00');
INSERT INTO "budgets" VALUES(4,'slots','patient','replace-one',20.0,0.0001,2.0,'2026-11-22T21:26:53.233+00:00');
INSERT INTO "budgets" VALUES(5,'synthetic-notes',NULL,NULL,NULL,NULL,9e999,'2026-11-22T21:26:53.238+00:00');
CREATE TABLE datasets (
	name VARCHAR(200) NOT NULL, 
	budget_id INTEGER NOT NULL, 
	registered_at VARCHAR(40) NOT NULL, 
	PRIMARY KEY (name), 
	FOREIGN KEY(budget_id) REFERENCES budgets (id)
);
INSERT INTO "datasets" VALUES('notes',1,'2026-11-22T21:26:53.203+00:00');
INSERT INTO "datasets" VALUES('letters',1,'2026-11-22T21:26:53.212+00:00');
INSERT INTO "datasets" VALUES('ward',2,'2026-11-22T21:26:53.218+00:00');
INSERT INTO "datasets" VALUES('epochs',3,'2026-11-22T21:26:53.227+00:00');
INSERT INTO "datasets" VALUES('slots',4,'2026-11-22T21:26:53.233+00:00');
INSERT INTO "datasets" VALUES('synthetic-notes',5,'2026-11-22T21:26:53.238+00:00');
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
INSERT INTO "entries" VALUES(1,'80e74c71ebc2a2baea95b52f5c8e524a',1,'notes','patient','{"kind":"thresholded_histogram","mechanism":"set-counts","noise":"discrete-gaussian","sigma":80.0,"threshold":600,"unit":"patient","version":1,"words_per_unit":64}',1.0e-07,'spec-1',0,'settled','dp_bert/run-1 · notes',1,'dp_bert/run-1','466b76b3dd219c7a2949de2a507efa4e','768eb607c446930a31ecb82f3de183d9:37d36f7b5894f3210fdbc61187528894ec43fe06c4e8581f14e6c7b50ae1e6f4','8334df6c43ec824d9ec012564c03c1ef0b1c81b0853667e7e435a4fb64550ee7',0,'2026-11-22T21:26:53.265+00:00','2026-11-22T21:26:53.278+00:00','');
INSERT INTO "entries" VALUES(2,'2100079bfc7a33e0cf65a5028b5b342e',1,'notes','patient','{"kind":"poisson_gaussian","phases":[[0.01,1.5,200],[0.02,2.0,100]],"unit":"patient","version":1}',1.0e-07,'spec-2',0,'settled','dp_bert/run-1 · notes',1,'dp_bert/run-1','352a983c5427415d3f5e1a2226ee7bbb','274cf8813196f0d596fa54c57bfdf4e2:ab29ddb5dea646fbd700285dee032653a739fcb7d02600b57864ec9f63af8a31','4b3ed5e038d266f4ab1827a8ca7dc7d22773a4d79f0df4681f0e92520b8a9417',0,'2026-11-22T21:26:53.287+00:00','2026-11-22T21:26:53.297+00:00','');
INSERT INTO "entries" VALUES(3,'e92ecdf22d1270ee751164f8d2989741',1,'notes','patient','{"count":2,"kind":"gaussian","noise_multiplier":9.0,"unit":"patient","version":1}',1.0e-07,'spec-3',0,'reserved','dp_bert/run-1 · notes',1,'dp_bert/run-1','abf01b3cd21bdf78e309f2baa2a5a5f8','','',0,'2026-11-22T21:26:53.304+00:00','','');
INSERT INTO "entries" VALUES(4,'df802b28d797bb5f21e9cc130ff41f2a',1,'notes','patient','{"count":1,"kind":"gaussian","noise_multiplier":10.0,"unit":"patient","version":1}',1.0e-07,'spec-4',0,'planned','dp_bert/run-1 · notes',1,'dp_bert/run-1','dcc3da51d1c8c610ff938b3a6b7f0346','','',0,'2026-11-22T21:26:53.256+00:00','','');
INSERT INTO "entries" VALUES(5,'1883d491a80eca2a0259e50c5ef6eb9f',1,'notes','patient','{"candidates":[{"count":1,"kind":"gaussian","noise_multiplier":8.0,"unit":"patient","version":1},{"count":1,"kind":"gaussian","noise_multiplier":12.0,"unit":"patient","version":1}],"count":"poisson","delta":1e-07,"eta":0.0,"gamma":0.0,"kind":"random_count_selection","mean":3.0,"unit":"patient","version":1}',1.0e-07,'spec-5',0,'withdrawn','dp_sweep/run-2 · notes',1,'dp_sweep/run-2','f1f0fb7bb1cb1bd8b09639d657f7b812','','',0,'2026-11-22T21:26:53.314+00:00','','2026-11-22T21:26:53.322+00:00');
INSERT INTO "entries" VALUES(6,'2b324b710a69737ecacaa2addd04a30e',1,'notes','patient','{"candidates":[{"count":1,"kind":"gaussian","noise_multiplier":8.0,"unit":"patient","version":1},{"count":1,"kind":"gaussian","noise_multiplier":12.0,"unit":"patient","version":1}],"count":"poisson","delta":1e-07,"eta":0.0,"gamma":0.0,"kind":"random_count_selection","mean":3.0,"unit":"patient","version":1}',1.0e-07,'spec-6',0,'settled','dp_sweep/run-3',0,'dp_sweep/run-3','973416afd0a850e4de93ebfcb8869ad8','afab216b91c3eb77ee27a5af1fc39c24:5a980deca660693cb256048f6af73ad2a7d4fa3312708253129cee3d1dcb5709','4305376667444dfb549489888783c1d0218f95b22483039e16e639b2d9e847cd',0,'2026-11-22T21:26:53.363+00:00','2026-11-22T21:26:53.380+00:00','');
INSERT INTO "entries" VALUES(7,'27bf9ea378a2ba6891d84ef756aab2bd',1,'notes','patient','{"candidates":[{"count":1,"kind":"gaussian","noise_multiplier":8.0,"unit":"patient","version":1},{"count":1,"kind":"gaussian","noise_multiplier":12.0,"unit":"patient","version":1}],"count":"truncated-negative-binomial","delta":1e-07,"eta":1.0,"gamma":0.5,"kind":"random_count_selection","mean":0.0,"unit":"patient","version":1}',1.0e-07,'spec-7',0,'settled','',0,'','2903aa6684e7cbc12e3d456332db2072','f28512edb4a86ffdd69fa1e26d9bef1a:32bc3f75b34771dda63db46c0969f25b5e4f534a0de2ee41e237965caec41b80','36d0ac37f24833cadd4787e004ff3d8240ce216607e86a19e320798c7c078b67',0,'2026-11-22T21:26:53.398+00:00','2026-11-22T21:26:53.415+00:00','');
INSERT INTO "entries" VALUES(8,'93e5f2a28c27717010b995ee484e3aad',1,'notes','patient','{"cap":30,"declared_units":1000,"kind":"truncated_poisson_gaussian","phases":[[0.01,4.0,20]],"unit":"patient","version":1}',1.0e-07,'spec-8',0,'reserved','',0,'','e2b670575753e80a109b26ec915a3ea8','','',0,'2026-11-22T21:26:53.511+00:00','','');
INSERT INTO "entries" VALUES(9,'fc1deefea9d230e7114c6beadf18c71b',1,'notes','patient','{"events":[{"count":1,"kind":"gaussian","noise_multiplier":20.0,"unit":"patient","version":1},{"kind":"thresholded_histogram","mechanism":"set-counts","noise":"discrete-gaussian","sigma":80.0,"threshold":600,"unit":"patient","version":1,"words_per_unit":64}],"kind":"composed","unit":"patient","version":1}',1.0e-07,'spec-9',0,'settled','',0,'','c2d0dcc1b548a44d191cb4ff80c9396d','37f7c6a03b99c7d563a3acb7d7fb063d:83a37f0971760d704f187df72d513024c1766c1d84be718befd0581c72df6b1b','6ccf5c4df59efa38deb05435794cdc3f09511741622916c0b0c18bf8fabef7a2',0,'2026-11-22T21:26:53.530+00:00','2026-11-22T21:26:53.548+00:00','');
INSERT INTO "entries" VALUES(10,'70f58124b69412320249b879263c692b',1,'notes','patient','{"count":1,"kind":"gaussian","noise_multiplier":30.0,"unit":"patient","version":1}',1.0e-07,'twice',0,'reserved','',0,'','8ba767dca0bd79cdb7ed03ef19687858','5ef6741de47c93f2afc964dcaa96985e:42ccc2d57ed28f26574e49114fdf5294804824ec466b841c01f011659b659004','cf7ded5629283274902a6f13063df243a4ef7cffb84d4d87df6e6c31ee7f9015',0,'2026-11-22T21:26:53.567+00:00','','');
INSERT INTO "entries" VALUES(11,'81b23a171b8619fd2f61966a1c084fb9',1,'notes','patient','{"count":1,"kind":"gaussian","noise_multiplier":30.0,"unit":"patient","version":1}',1.0e-07,'twice',1,'reserved','',0,'','d24adaebd859d1f0afaf7ccf224f82a5','9db8757c8a44da78a8332e00ca8975f6:200ea4220f4bbaf309f3d3b1edbdb49f18e51fe064c88595e9c07c96e83b9354','b1e2e0de634c58c9b06d183a3f4912a71f8ca41dc7f8f7d5a7c0e8b495656c13',0,'2026-11-22T21:26:53.594+00:00','','');
INSERT INTO "entries" VALUES(12,'46ff40e58200f58cd480e468445aea60',1,'notes','patient','{"kind":"unaccounted","reason":"non-private training","unit":"patient","version":1}',0.0,'spec-12',0,'settled','',0,'','e00c78a6bc9189359c375adcabc8f396','','',0,'2026-11-22T21:26:53.620+00:00','2026-11-22T21:26:53.631+00:00','');
INSERT INTO "entries" VALUES(13,'a4cfc92bafe79f2cc605d38e7fd38ca3',1,'notes','patient','{"kind":"unaccounted","reason":"fine-tuning without privacy","unit":"patient","version":1}',0.0,'spec-13',0,'reserved','',0,'','b76054db3f2746ce33b2d5956850f58b','','',0,'2026-11-22T21:26:53.711+00:00','','');
INSERT INTO "entries" VALUES(14,'0e9884529d3ad1265afc29327346c0e1',1,'letters','patient','{"count":1,"kind":"gaussian","noise_multiplier":15.0,"unit":"patient","version":1}',1.0e-07,'spec-14',0,'settled','',0,'','4818779e0069d6beeab90a7487e8ddd1','3fc44329d5a8cb834d27cf4def579bcf:14a0722f276ec068827b0730d7bc6c1fd4a8cd61955405e86683307fa590943e','a5aae33c1b1554279493316c4a4efce207691e1663f83fe33b1c2545b3bda96c',0,'2026-11-22T21:26:53.731+00:00','2026-11-22T21:26:53.749+00:00','');
INSERT INTO "entries" VALUES(15,'1b19e1a23da7a9212887f57cde9b150c',2,'ward','document','{"kind":"thresholded_histogram","mechanism":"set-counts","noise":"discrete-gaussian","sigma":80.0,"threshold":600,"unit":"document","version":1,"words_per_unit":64}',1.0e-07,'spec-15',0,'settled','whole',1,'whole','73ca6aa0f23cacde06cd6a7dff9d99f4','bf827822a352d3d22ece20afbb02560e:77d86ee3226ae16c431ca555758611227250cab1a62f20023021bdb57f4449e3','0a8b8d89c7ed56dd44bd2767ee86e8908f634dd8e6f067907a71fcfc918d0987',0,'2026-11-22T21:26:53.916+00:00','2026-11-22T21:26:53.924+00:00','');
INSERT INTO "entries" VALUES(16,'ad8cd916133a2074f9fa55a36a70a155',2,'ward','document','{"kind":"poisson_gaussian","phases":[[0.01,1.5,200],[0.02,2.0,100]],"unit":"document","version":1}',1.0e-07,'spec-16',0,'reserved','whole',1,'whole','bf877d0fdf1418abe7df926e862eb317','','',0,'2026-11-22T21:26:53.931+00:00','','');
INSERT INTO "entries" VALUES(17,'7c50149881f31ec4d698c94fa9634cbb',2,'ward','document','{"count":1,"kind":"gaussian","noise_multiplier":8.0,"unit":"document","version":1}',1.0e-07,'spec-17',0,'planned','whole',1,'whole','1e2282fb3ddc46686ded2e56c8a79576','','',0,'2026-11-22T21:26:53.908+00:00','','');
INSERT INTO "entries" VALUES(18,'9179e0c7033503c7bdee85261b800f28',2,'ward','document','{"count":1,"kind":"gaussian","noise_multiplier":12.0,"unit":"document","version":1}',1.0e-07,'spec-18',0,'settled','',0,'','ee4520cbf15c752934ff021e41a18e92','7f65e1373062fd86ae78b667cf5596df:c1971cb0944eb6749db5f89a5553b17aeef319f655aed1f8d30dcc1c5f32c568','107aa39b8c3170d87ff4c422d9e8cdbf8811a8c89a06f7deb6e0b943e86abb1f',0,'2026-11-22T21:26:53.945+00:00','2026-11-22T21:26:53.957+00:00','');
INSERT INTO "entries" VALUES(19,'625a3c88078a8081a8a70f2891daef04',2,'ward','document','{"candidates":[{"count":1,"kind":"gaussian","noise_multiplier":8.0,"unit":"document","version":1},{"count":1,"kind":"gaussian","noise_multiplier":12.0,"unit":"document","version":1}],"count":"truncated-negative-binomial","delta":1e-07,"eta":1.0,"gamma":0.5,"kind":"random_count_selection","mean":0.0,"unit":"document","version":1}',1.0e-07,'spec-19',0,'settled','',0,'','30cc41df5e579dce71bd43e516c111dd','8773f0c416d2f2b16856f78fd8d99ead:98389ae9143df5d2865411a5e6dc2880e853cd0545accca8d4a7d149d0d800ce','16a61b5fd7c4943e0be17cbc6656e902f7ad10d4c84408aa132b1867dba9aaa2',0,'2026-11-22T21:26:53.966+00:00','2026-11-22T21:26:53.975+00:00','');
INSERT INTO "entries" VALUES(20,'b14ae621c5b0c2ebef1ec627f03cdbd3',2,'ward','document','{"kind":"poisson_gaussian","phases":[[0.01,1.5,200],[0.02,2.0,100]],"unit":"document","version":1}',1.0e-07,'spec-20',0,'withdrawn','given back',1,'','021f535c68d40e8c64a8fdaadbe19c9b','','',0,'2026-11-22T21:26:54.052+00:00','','2026-11-22T21:26:54.059+00:00');
INSERT INTO "entries" VALUES(21,'c1b7363533138865beaa75e8af1e1a7f',3,'epochs','example','{"kind":"shuffled_gaussian","noise_multiplier":6.0,"participations":3,"unit":"example","version":1}',1.0e-07,'spec-21',0,'settled','',0,'','40862e0354a7f1f73d944b2ba1bf8994','0d196d7a7c43f0a246471370522ff44f:18a7594343ab7171fd443444ece5de8133e44bf3a78710820cca5e33da59d4b4','f24916edf94edc816a4641dc7803ad3f5b8ccb89776239089dbaf599a928e0b1',0,'2026-11-22T21:26:54.066+00:00','2026-11-22T21:26:54.076+00:00','');
INSERT INTO "entries" VALUES(22,'eca61355cc190104e52ad20bddf6057d',3,'epochs','example','{"delta":0.0,"event":{"kind":"thresholded_histogram","mechanism":"set-counts","noise":"discrete-gaussian","sigma":80.0,"threshold":600,"unit":"example","version":1,"words_per_unit":64},"kind":"restated","to":"zero-out-one","unit":"example","version":1}',1.0e-07,'spec-22',0,'settled','',0,'','87ef882d5d207935c9a992dd30697d62','f2eda98e53085480d8474658e9e41724:38e2c4d3920f62fdc50d54224f9c067af8976bc99bf46d429d34b7d4de009e5d','e6418e1be2e9a729b1ad106d3d6e1b8cbc2cde77a1b90095283ade9b20c8258a',0,'2026-11-22T21:26:54.084+00:00','2026-11-22T21:26:54.095+00:00','');
INSERT INTO "entries" VALUES(23,'f43e6e3ca705a2584f5b00e4c95debc1',3,'epochs','example','{"delta":0.0,"event":{"kind":"poisson_gaussian","phases":[[0.01,1.5,200],[0.02,2.0,100]],"unit":"example","version":1},"kind":"restated","to":"zero-out-one","unit":"example","version":1}',1.0e-07,'spec-23',0,'reserved','',0,'','1949a776d8625d09ae1261ee9660d6cb','','',0,'2026-11-22T21:26:54.103+00:00','','');
INSERT INTO "entries" VALUES(24,'1a9492cb29e9fae7e4df6ce5e87b2ac0',4,'slots','patient','{"kind":"fixed_size_gaussian","phases":[[10.0,4.0,50]],"slots":1000,"unit":"patient","version":1}',1.0e-07,'spec-24',0,'settled','',0,'','1b6848313904a8b80ad356db51dc58b6','b32fb5975850d510ecae2c4b08717eae:daa3cae0c5c567a7d72a6a9048b5d40e45f4e5fd6edac1a76d6e508a2599453a','610209a1527a094244a772f5e393d69089a44f73aaacb967cd7f1c4f6345db42',0,'2026-11-22T21:26:54.112+00:00','2026-11-22T21:26:54.122+00:00','');
INSERT INTO "entries" VALUES(25,'71e83117f945b1cdec59998df0bddb4b',4,'slots','patient','{"delta":1e-08,"event":{"kind":"thresholded_histogram","mechanism":"set-counts","noise":"discrete-gaussian","sigma":80.0,"threshold":600,"unit":"patient","version":1,"words_per_unit":64},"kind":"restated","to":"replace-one","unit":"patient","version":1}',1.0e-07,'spec-25',0,'settled','',0,'','1d652a857182e627c627daa0ec3cd80f','8e7fc85e3d81f951712c1ac2239feeba:0409a64c71982dfa80dfe44eeaece8ff4741da9cd1865f63c6df6e094fa01eea','ed7c11c8f0f4b83118ec269f670bc42df2880ab2c3b34e61590b8b17ca603fbf',0,'2026-11-22T21:26:54.189+00:00','2026-11-22T21:26:54.202+00:00','');
INSERT INTO "entries" VALUES(26,'4c9b76c503996359d9356513e31d7685',4,'slots','patient','{"delta":1e-08,"event":{"candidates":[{"count":1,"kind":"gaussian","noise_multiplier":8.0,"unit":"patient","version":1},{"count":1,"kind":"gaussian","noise_multiplier":12.0,"unit":"patient","version":1}],"count":"truncated-negative-binomial","delta":1e-07,"eta":1.0,"gamma":0.5,"kind":"random_count_selection","mean":0.0,"unit":"patient","version":1},"kind":"restated","to":"replace-one","unit":"patient","version":1}',1.0e-07,'spec-26',0,'reserved','',0,'','3a2f81a7f42b5b5c0b56c80394c8d9c2','','',0,'2026-11-22T21:26:54.227+00:00','','');
INSERT INTO "entries" VALUES(27,'95cdac3c5664cdf62a55384c15993a0c',5,'synthetic-notes','patient','{"kind":"poisson_gaussian","phases":[[0.01,1.5,200],[0.02,2.0,100]],"unit":"patient","version":1}',1.0e-07,'spec-27',0,'settled','',0,'','782e8bd5cfe7f11b8e2de0694492f593','88099b245de6519773cfe74a98d233a3:fd700108e846191386a65dcba524ff161f1fdae59f4546727168a88604ae8fac','e26a2be02819ec54bb804034ac71595d3891a7f276301ec595b574ea3b01a38c',1,'2026-11-22T21:26:54.235+00:00','2026-11-22T21:26:54.245+00:00','');
INSERT INTO "entries" VALUES(28,'ff63aba232a86d5730450e40df9a58e5',5,'synthetic-notes','patient','{"kind":"shuffled_gaussian","noise_multiplier":1.0,"participations":1,"unit":"patient","version":1}',1.0e-07,'spec-28',0,'settled','',0,'','54a2d3f1df2bf3a1e7ef69afc984d2ed','3ba7e3102d0574471244905ffea391da:70718670c6977d6af4ee2a46ddb442637800e7806a2ad61849b1e67632179d54','09482b7b34641570d924a1de0e36ddafb9ecf030e6c1aec9a2b7f41f643b0823',0,'2026-11-22T21:26:54.253+00:00','2026-11-22T21:26:54.263+00:00','');
INSERT INTO "entries" VALUES(29,'2cd720c2a11de89946c74b2779275ee4',5,'synthetic-notes','patient','{"kind":"unaccounted","reason":"non-private training","unit":"patient","version":1}',0.0,'spec-29',0,'settled','',0,'','e8461beab7749b7376484ee720e71ae4','','',0,'2026-11-22T21:26:54.271+00:00','2026-11-22T21:26:54.276+00:00','');
CREATE TABLE ledger_schema (
	version INTEGER NOT NULL
);
INSERT INTO "ledger_schema" VALUES(2);
CREATE INDEX ix_entries_budget_id ON entries (budget_id);
COMMIT;
