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
INSERT INTO "budgets" VALUES(1,'notes','patient','add-or-remove-one',8.0,1.0e-05,4.0,'2026-11-22T22:27:29.248+00:00');
INSERT INTO "budgets" VALUES(2,'ward','document','add-or-remove-one',6.0,1.0e-05,9e999,'2026-11-22T22:27:29.351+00:00');
INSERT INTO "budgets" VALUES(3,'epochs','example','zero-out-one',12.0,1.0e-05,3.0,'2026-11-22T22:27:29.398+00:00');
INSERT INTO "budgets" VALUES(4,'slots','patient','replace-one',20.0,0.0001,2.0,'2026-11-22T22:27:29.433+00:00');
INSERT INTO "budgets" VALUES(5,'synthetic-notes',NULL,NULL,NULL,NULL,9e999,'2026-11-22T22:27:29.483+00:00');
CREATE TABLE datasets (
	name VARCHAR(200) NOT NULL, 
	budget_id INTEGER NOT NULL, 
	registered_at VARCHAR(40) NOT NULL, 
	PRIMARY KEY (name), 
	FOREIGN KEY(budget_id) REFERENCES budgets (id)
);
INSERT INTO "datasets" VALUES('notes',1,'2026-11-22T22:27:29.258+00:00');
INSERT INTO "datasets" VALUES('letters',1,'2026-11-22T22:27:29.307+00:00');
INSERT INTO "datasets" VALUES('ward',2,'2026-11-22T22:27:29.351+00:00');
INSERT INTO "datasets" VALUES('epochs',3,'2026-11-22T22:27:29.399+00:00');
INSERT INTO "datasets" VALUES('slots',4,'2026-11-22T22:27:29.433+00:00');
INSERT INTO "datasets" VALUES('synthetic-notes',5,'2026-11-22T22:27:29.484+00:00');
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
INSERT INTO "entries" VALUES(1,'6b7865e5dc1278e30ee780565cae0641',1,'notes','patient','{"kind":"thresholded_histogram","mechanism":"set-counts","noise":"discrete-gaussian","sigma":80.0,"threshold":600,"unit":"patient","version":1,"words_per_unit":64}',1.0e-07,'spec-1',0,'settled','dp_bert/run-1 · notes',1,'dp_bert/run-1','df0a8fad396d7846409cc52d2b734f7c','5179ce639a329220bdc4ae35a4234837:b27a05a377cfc855546bc685df96c3efc8435f972f259321ff4331755a225127','703ae97646afe0950c3155b4cb74b4f2c55b1c9008a024d8f05e5bf5a942ddb2',0,'2026-11-22T22:27:29.650+00:00','2026-11-22T22:27:29.740+00:00','','37c227fc779aa0496139a6d29ea4e550b0549f3b1f2f33d208150423a6940c47');
INSERT INTO "entries" VALUES(2,'e4c4bf2a1c50bbf70108fbdc51ad2b2f',1,'notes','patient','{"kind":"poisson_gaussian","phases":[[0.01,1.5,200],[0.02,2.0,100]],"unit":"patient","version":1}',1.0e-07,'spec-2',0,'settled','dp_bert/run-1 · notes',1,'dp_bert/run-1','396ebaaa7f1ee9cd0e8398f15950e1b1','a5bf1f8d99246ce78d4007d59574c3fb:b70741c2c711064b0ca8a521097e53efdbb295cd3279e94b428e261ef7d24892','35476d126f1e7890e9a2558cf2cd6a3c343ef8b102bfacc11641adfcb568ddca',0,'2026-11-22T22:27:29.791+00:00','2026-11-22T22:27:29.889+00:00','','94ae62d214e986619098477efa20d13c540dea3f7f4bd5622be45355fd6ac5ec');
INSERT INTO "entries" VALUES(3,'45ea9fece92051201d8b045c893f9b97',1,'notes','patient','{"count":2,"kind":"gaussian","noise_multiplier":9.0,"unit":"patient","version":1}',1.0e-07,'spec-3',0,'reserved','dp_bert/run-1 · notes',1,'dp_bert/run-1','153881ccee2e6ec4f95736fbfe9eec6a','','',0,'2026-11-22T22:27:29.946+00:00','','','');
INSERT INTO "entries" VALUES(4,'3fc906f311fb2a4e23a1f1b0d2458330',1,'notes','patient','{"count":1,"kind":"gaussian","noise_multiplier":10.0,"unit":"patient","version":1}',1.0e-07,'spec-4',0,'planned','dp_bert/run-1 · notes',1,'dp_bert/run-1','fddf023abdbdc69b7fdaf75bfd949d8c','','',0,'2026-11-22T22:27:29.576+00:00','','','');
INSERT INTO "entries" VALUES(5,'4ba5bbc4377ce0dfb22334bbe709920a',1,'notes','patient','{"candidates":[{"count":1,"kind":"gaussian","noise_multiplier":8.0,"unit":"patient","version":1},{"count":1,"kind":"gaussian","noise_multiplier":12.0,"unit":"patient","version":1}],"count":"poisson","delta":1e-07,"eta":0.0,"gamma":0.0,"kind":"random_count_selection","mean":3.0,"unit":"patient","version":1}',1.0e-07,'spec-5',0,'withdrawn','dp_sweep/run-2 · notes',1,'dp_sweep/run-2','b9f5c467336c109d4fffe89ca6e46fa0','','',0,'2026-11-22T22:27:30.014+00:00','','2026-11-22T22:27:30.056+00:00','');
INSERT INTO "entries" VALUES(6,'43268cb03e3c800fe3b694c4d611c085',1,'notes','patient','{"candidates":[{"count":1,"kind":"gaussian","noise_multiplier":8.0,"unit":"patient","version":1},{"count":1,"kind":"gaussian","noise_multiplier":12.0,"unit":"patient","version":1}],"count":"poisson","delta":1e-07,"eta":0.0,"gamma":0.0,"kind":"random_count_selection","mean":3.0,"unit":"patient","version":1}',1.0e-07,'spec-6',0,'settled','dp_sweep/run-3',0,'dp_sweep/run-3','c183d8123e24186b498ae6d9fbdd7f27','570f122ad891fe90424d3ffb817aa2d4:7c00b97211511989048470f8b5f615a7e4596d14f4677c4d07876c13539fd15d','9a21fc44c8e84afb7e7d6174619eb02990abf8edc1bc9bd5eb3044f45fe4b2b7',0,'2026-11-22T22:27:30.241+00:00','2026-11-22T22:27:30.332+00:00','','c48609a44a298f492fdd473e3aea747451da2937fd99d0b92ff5c783047719a4');
INSERT INTO "entries" VALUES(7,'c1ff0cff7f5df99e7ce99886f78d468c',1,'notes','patient','{"candidates":[{"count":1,"kind":"gaussian","noise_multiplier":8.0,"unit":"patient","version":1},{"count":1,"kind":"gaussian","noise_multiplier":12.0,"unit":"patient","version":1}],"count":"truncated-negative-binomial","delta":1e-07,"eta":1.0,"gamma":0.5,"kind":"random_count_selection","mean":0.0,"unit":"patient","version":1}',1.0e-07,'spec-7',0,'settled','',0,'','55b5f7631a19c53087521db98f03fde7','a5bdcdc38046174442ff584b24df6c22:c4f177eec83ad506c1ab69c062218e5fcf734eff5cc3eefcea495ce3803c44e9','fac3428f15d81194966d62a40c501da42563fa78c223c9287dab036273f35e2b',0,'2026-11-22T22:27:30.389+00:00','2026-11-22T22:27:30.481+00:00','','bf6b731938e9d8403b50b185e960453c1c269f7215fb9d6ecd9230f0d75de377');
INSERT INTO "entries" VALUES(8,'377c455fe0da64705f22b895f4cca2be',1,'notes','patient','{"cap":30,"declared_units":1000,"kind":"truncated_poisson_gaussian","phases":[[0.01,4.0,20]],"unit":"patient","version":1}',1.0e-07,'spec-8',0,'reserved','',0,'','d9f74a4c6ebcd7f583f3b3aeb8d27e34','','',0,'2026-11-22T22:27:30.722+00:00','','','');
INSERT INTO "entries" VALUES(9,'1db799e744ac3a463c80260e209c7e92',1,'notes','patient','{"events":[{"count":1,"kind":"gaussian","noise_multiplier":20.0,"unit":"patient","version":1},{"kind":"thresholded_histogram","mechanism":"set-counts","noise":"discrete-gaussian","sigma":80.0,"threshold":600,"unit":"patient","version":1,"words_per_unit":64}],"kind":"composed","unit":"patient","version":1}',1.0e-07,'spec-9',0,'settled','',0,'','1f6bf0c5e646a2a205af3b6aac81d73c','5c6472a93d8b04fc83be621020d00eb0:f3bb5573843c9a7d605503d3e44ee5c7eac053b81beef478cdd95651cdce2fbf','fbcbbde1f60a6668787ab87d8537f5916054f384ab32b2a72e031d15bc5bf698',0,'2026-11-22T22:27:30.798+00:00','2026-11-22T22:27:30.898+00:00','','5698eaea2a74c9170297a2e514ec42b04f30dec82538a11ff1328552cd551861');
INSERT INTO "entries" VALUES(10,'ebbeac769b69516af25cb9282fa590e0',1,'notes','patient','{"count":1,"kind":"gaussian","noise_multiplier":30.0,"unit":"patient","version":1}',1.0e-07,'twice',0,'reserved','',0,'','6a02e3fc0030702231117af9010b31ed','4627e3a8de58f50527799a07a2b32853:465c377486651f83deeb7040df6b2453398ea4828947ed35ba3a31f78e227e40','8d16d2f9b4c65a69180625b8b4c87de372a72cc95c2af8b6d51fba8e73e44548',0,'2026-11-22T22:27:30.957+00:00','','','');
INSERT INTO "entries" VALUES(11,'c4f00c2cbdbfe3ef1b0140a9e5e33e6f',1,'notes','patient','{"count":1,"kind":"gaussian","noise_multiplier":30.0,"unit":"patient","version":1}',1.0e-07,'twice',1,'reserved','',0,'','1d64ec184fc50feb24dbb84704b36b6b','5095327d1358e8da6c5c43b918f8453a:00aa8698763b798516d42a0622c101e232097965a17bc06ef726071218998a82','f3b49df723d5e7760b89aa9afa5b508aa12a0f513443c9b8f3129efcb8330e5c',0,'2026-11-22T22:27:31.089+00:00','','','');
INSERT INTO "entries" VALUES(12,'0b9fd2832043487d29d235b798531062',1,'notes','patient','{"kind":"unaccounted","reason":"non-private training","unit":"patient","version":1}',0.0,'spec-12',0,'settled','',0,'','9234ad4bd22c078ccf185097a7e0b049','','',0,'2026-11-22T22:27:31.423+00:00','2026-11-22T22:27:31.490+00:00','','');
INSERT INTO "entries" VALUES(13,'0d53c4084384fcdbc5e1601fe8a501ba',1,'notes','patient','{"kind":"unaccounted","reason":"fine-tuning without privacy","unit":"patient","version":1}',0.0,'spec-13',0,'reserved','',0,'','3664fd94008c82d9942198d066da6749','','',0,'2026-11-22T22:27:31.554+00:00','','','');
INSERT INTO "entries" VALUES(14,'e1a7c7f5c30cad07f2f210be5fd7b8bd',1,'letters','patient','{"count":1,"kind":"gaussian","noise_multiplier":15.0,"unit":"patient","version":1}',1.0e-07,'spec-14',0,'settled','',0,'','43c0138a5e5bdac55c68c70e9c08220d','5e6c20ffdf7bbe5047a56a47fe1a84fd:c3d2080240e9c35607ca6ab627cfb5b021d6eb42db463ca0f90b7bd90cb6c7c6','3fe125db7ebd72c851a11fb13a657d5f9276dfe237e8583db03f248b8fc20fb8',0,'2026-11-22T22:27:31.609+00:00','2026-11-22T22:27:31.680+00:00','','79cd0f6811cc0ed8160e49bca11912dcc01ad9f7a3f611fd9d65243f0e963559');
INSERT INTO "entries" VALUES(15,'6060c9e57c507f12e48d613d9fc88019',2,'ward','document','{"kind":"thresholded_histogram","mechanism":"set-counts","noise":"discrete-gaussian","sigma":80.0,"threshold":600,"unit":"document","version":1,"words_per_unit":64}',1.0e-07,'spec-15',0,'settled','whole',1,'whole','bab742b627667f7b2858703676b06386','71fb719c89e2f89c10d52d5d9dcd87ea:4a16923cac9e8ff79235d3be67e1c82c2eab5f72ec3ef2a2d93b7c984f2032f9','d3439d3001ad5a744521ce2eaa8e285f36b6241b277dda3a8136c4d5cc63de59',0,'2026-11-22T22:27:32.469+00:00','2026-11-22T22:27:32.577+00:00','','4554534a7d7f27f14123e18f9c60e421082ea318fc1fe28d80e023e22f72a757');
INSERT INTO "entries" VALUES(16,'cfb316144a68300d057d1f41e271ab10',2,'ward','document','{"kind":"poisson_gaussian","phases":[[0.01,1.5,200],[0.02,2.0,100]],"unit":"document","version":1}',1.0e-07,'spec-16',0,'reserved','whole',1,'whole','d177a41c7edb99a931129cd01632490a','','',0,'2026-11-22T22:27:32.645+00:00','','','');
INSERT INTO "entries" VALUES(17,'75f5e3a39ffeef9292a7ed0f5c73aed4',2,'ward','document','{"count":1,"kind":"gaussian","noise_multiplier":8.0,"unit":"document","version":1}',1.0e-07,'spec-17',0,'planned','whole',1,'whole','cc7a87fff261ebf5694c1761690150fa','','',0,'2026-11-22T22:27:32.410+00:00','','','');
INSERT INTO "entries" VALUES(18,'e34c2babd3b248f76158aee02d2fe76c',2,'ward','document','{"count":1,"kind":"gaussian","noise_multiplier":12.0,"unit":"document","version":1}',1.0e-07,'spec-18',0,'settled','',0,'','8275ff7898853198d4f380a7f9ebd82e','0f3f596f4b08236c0a469c7149478331:e025ef0e680c6e1e4572b8a41413aad6befd5244448d088d1b7ecaffec8737e9','37be2d2459f6a5294c7aabd4235c8259a847645ca11aeffcc789ac0555c402b5',0,'2026-11-22T22:27:32.754+00:00','2026-11-22T22:27:32.853+00:00','','2bc1da227f8499f739922eb29d4cfb6ec04e132cb9e809c7227526b070685b8f');
INSERT INTO "entries" VALUES(19,'fcf31f1e1accbe00748dd5fc7ebb7059',2,'ward','document','{"candidates":[{"count":1,"kind":"gaussian","noise_multiplier":8.0,"unit":"document","version":1},{"count":1,"kind":"gaussian","noise_multiplier":12.0,"unit":"document","version":1}],"count":"truncated-negative-binomial","delta":1e-07,"eta":1.0,"gamma":0.5,"kind":"random_count_selection","mean":0.0,"unit":"document","version":1}',1.0e-07,'spec-19',0,'settled','',0,'','deca926edbd0d11bc240e96f00c4e9fd','204a0f2d6d27f80555703e209d74d43f:595149b6b2cf97f59695e6b6d3a003b6240d9bbbdba8885d4e42bf7ad3f4b547','603615306734237c7ec2014eed6026c606f7d0306a2233d6ddfbfda0b45b7f44',0,'2026-11-22T22:27:32.927+00:00','2026-11-22T22:27:33.038+00:00','','8a86c98d098a4bcc3619bc4cc0e877e2f6dc4495b12f8c486cbd7a5290332dad');
INSERT INTO "entries" VALUES(20,'d4ed868c79aff9eb1ae019715f05245a',2,'ward','document','{"kind":"poisson_gaussian","phases":[[0.01,1.5,200],[0.02,2.0,100]],"unit":"document","version":1}',1.0e-07,'spec-20',0,'withdrawn','given back',1,'','1269d90b712593bc8be92be37979dac9','','',0,'2026-11-22T22:27:33.384+00:00','','2026-11-22T22:27:33.429+00:00','');
INSERT INTO "entries" VALUES(21,'fe69018c5e12f183cb61cb8818443956',3,'epochs','example','{"kind":"shuffled_gaussian","noise_multiplier":6.0,"participations":3,"unit":"example","version":1}',1.0e-07,'spec-21',0,'settled','',0,'','2dadab48d987c7a279ea46fc002cbaec','65b351e9fc843ac4b558b6a6744fdfc8:4b804654f95f37ce2939b56723ef613ce7f129e5f1669546f0001955a5d7241f','465afcc33b928a0af7a82d8b8a85874ebdb7aa77f16ab9d9bdd1fac591690882',0,'2026-11-22T22:27:33.494+00:00','2026-11-22T22:27:33.568+00:00','','c16378ace3191a5394b15d9bd19980ddfe64d664d1a1c6658e432f2dc5335b06');
INSERT INTO "entries" VALUES(22,'36f05149b4a35f6e29d5303c822f0be1',3,'epochs','example','{"delta":0.0,"event":{"kind":"thresholded_histogram","mechanism":"set-counts","noise":"discrete-gaussian","sigma":80.0,"threshold":600,"unit":"example","version":1,"words_per_unit":64},"kind":"restated","to":"zero-out-one","unit":"example","version":1}',1.0e-07,'spec-22',0,'settled','',0,'','7fdb64e6533f37ed47944a3b56fd816c','81f07c4b342c18677a373e937e58fafd:87be7e5e7250fb584de2de763faf2fc228f5627c44bda290ce0f62f783711afb','36699894a5c16cc7895417861bfb6ba13988731d88ba9fdc4487a88bd4affffa',0,'2026-11-22T22:27:33.621+00:00','2026-11-22T22:27:33.711+00:00','','95bd826774b13c19714363b1c28394cbe2ee1b83d0e9adcad12a78deca253dc5');
INSERT INTO "entries" VALUES(23,'091694ac0798485d4e6cb14f07cc8f63',3,'epochs','example','{"delta":0.0,"event":{"kind":"poisson_gaussian","phases":[[0.01,1.5,200],[0.02,2.0,100]],"unit":"example","version":1},"kind":"restated","to":"zero-out-one","unit":"example","version":1}',1.0e-07,'spec-23',0,'reserved','',0,'','c0e70ffc138647161002a4c9b82ebb91','','',0,'2026-11-22T22:27:33.749+00:00','','','');
INSERT INTO "entries" VALUES(24,'d31ad8daf4dc089bf4dfe57ab65bc5b7',4,'slots','patient','{"kind":"fixed_size_gaussian","phases":[[10.0,4.0,50]],"slots":1000,"unit":"patient","version":1}',1.0e-07,'spec-24',0,'settled','',0,'','6154400eaba5b19f04afc6a337c9311f','a671fc9af7e31055164da5416682d5eb:4a4f250d75980388fc0c1030b599656cb987b79ae36826fa6631c0fcf0d281c1','d6402e42faab36dfe0829f9144165048075f2ec0055e8bb15182d0002a3f2b6f',0,'2026-11-22T22:27:33.809+00:00','2026-11-22T22:27:33.889+00:00','','13eb49757af21c95ebae029d7b0a049a36f665470b5fa2c4e61f4a5af6884269');
INSERT INTO "entries" VALUES(25,'fd7d83f02960739074bc2d7007a65a41',4,'slots','patient','{"delta":1e-08,"event":{"kind":"thresholded_histogram","mechanism":"set-counts","noise":"discrete-gaussian","sigma":80.0,"threshold":600,"unit":"patient","version":1,"words_per_unit":64},"kind":"restated","to":"replace-one","unit":"patient","version":1}',1.0e-07,'spec-25',0,'settled','',0,'','e6f0cda3ceae2cd397c8544e32cfff73','01e0993d94349cac53eeb0456f42e6d1:70cc297df69b79ad67c77538572230a6222ec02b7524a0cef377cab27cbf6b84','5d174326852767bcb90ea6c6e9240804f5b5f5786ab798444a8592e9d5e35906',0,'2026-11-22T22:27:34.155+00:00','2026-11-22T22:27:34.247+00:00','','35ff56b9e73b912a6a9a075aaf28fdc11dc512efe75d9ab18761668ec6a53391');
INSERT INTO "entries" VALUES(26,'d481d069aa7ca3b8dcb4d9e9ea5a585f',4,'slots','patient','{"delta":1e-08,"event":{"candidates":[{"count":1,"kind":"gaussian","noise_multiplier":8.0,"unit":"patient","version":1},{"count":1,"kind":"gaussian","noise_multiplier":12.0,"unit":"patient","version":1}],"count":"truncated-negative-binomial","delta":1e-07,"eta":1.0,"gamma":0.5,"kind":"random_count_selection","mean":0.0,"unit":"patient","version":1},"kind":"restated","to":"replace-one","unit":"patient","version":1}',1.0e-07,'spec-26',0,'reserved','',0,'','7283e642f873c93e4f51806fe99175b3','','',0,'2026-11-22T22:27:34.411+00:00','','','');
INSERT INTO "entries" VALUES(27,'7470895cae7fcd3877b939c0fbbee880',5,'synthetic-notes','patient','{"kind":"poisson_gaussian","phases":[[0.01,1.5,200],[0.02,2.0,100]],"unit":"patient","version":1}',1.0e-07,'spec-27',0,'settled','',0,'','3f237e19f538a90be3547f46ae4ce639','88099b245de6519773cfe74a98d233a3:fd700108e846191386a65dcba524ff161f1fdae59f4546727168a88604ae8fac','e26a2be02819ec54bb804034ac71595d3891a7f276301ec595b574ea3b01a38c',1,'2026-11-22T22:27:34.463+00:00','2026-11-22T22:27:34.540+00:00','','7d53c809ef1425fb48b72f1f8273437d1babd53516f902b9b2906cf6999df2ec');
INSERT INTO "entries" VALUES(28,'1d6e2da30c59774206bb6bdc27bc6541',5,'synthetic-notes','patient','{"kind":"shuffled_gaussian","noise_multiplier":1.0,"participations":1,"unit":"patient","version":1}',1.0e-07,'spec-28',0,'settled','',0,'','37ed8aa4acd9c96ae50a5241d1461c14','2272097ac5ed3af4faee6c4e190641b6:da1ad3997859d348bdb5816c442bf69a6000370e82f09d83ce8855bd37ac848b','03f959fa5dcb29acc066734987096cecfab76a09ecc28fbb692942820921621b',0,'2026-11-22T22:27:34.591+00:00','2026-11-22T22:27:34.658+00:00','','053f6cc7491b8007a9ec0b7ba32f08ad25d13d5b876491c13b6ea7a622aa6e11');
INSERT INTO "entries" VALUES(29,'2c53f79b4603ab7f21be6ab638717345',5,'synthetic-notes','patient','{"kind":"unaccounted","reason":"non-private training","unit":"patient","version":1}',0.0,'spec-29',0,'settled','',0,'','b398d84ba3001bc9648e3d0b45fa7094','','',0,'2026-11-22T22:27:34.704+00:00','2026-11-22T22:27:34.736+00:00','','');
CREATE TABLE ledger_identity (id VARCHAR(32) NOT NULL);
INSERT INTO "ledger_identity" VALUES('1d773543632cb542946858041cf27f18');
CREATE TABLE ledger_schema (
	version INTEGER NOT NULL
);
INSERT INTO "ledger_schema" VALUES(3);
CREATE TABLE private_sources (
            digest VARCHAR(64) NOT NULL,
            dataset VARCHAR(200) NOT NULL REFERENCES datasets (name),
            read_at VARCHAR(40) NOT NULL,
            PRIMARY KEY (digest, dataset)
        );
CREATE TABLE public_sources (
            digest VARCHAR(64) NOT NULL PRIMARY KEY,
            label VARCHAR(200) NOT NULL,
            declared_at VARCHAR(40) NOT NULL,
            known_private BOOLEAN NOT NULL
        );
CREATE INDEX ix_entries_budget_id ON entries (budget_id);
COMMIT;
