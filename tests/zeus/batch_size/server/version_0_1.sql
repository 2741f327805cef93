BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE events (
	job_id VARCHAR(400) NOT NULL, 
	number BIGINT NOT NULL, 
	trial_number BIGINT, 
	at_s DOUBLE NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	body TEXT NOT NULL, 
	PRIMARY KEY (job_id, number), 
	CONSTRAINT events_trial FOREIGN KEY(job_id, trial_number) REFERENCES trials (job_id, number) ON DELETE CASCADE, 
	FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO "events" VALUES('nightly',1,NULL,1001.0,'registered','{}');
INSERT INTO "events" VALUES('nightly',2,1,1002.0,'begun','{"batch_size": 64, "cost_bound": null}');
INSERT INTO "events" VALUES('nightly',3,1,1003.0,'report','{"time": 100.0, "energy": 20000.0, "metric": 0.9, "current_epoch": 5, "overhead_time": 0.0, "overhead_energy": 0.0}');
INSERT INTO "events" VALUES('nightly',4,1,1003.0,'ended','{"reason": "ok", "converged": true}');
INSERT INTO "events" VALUES('nightly',5,2,1004.0,'begun','{"batch_size": 16, "cost_bound": 50000.0}');
INSERT INTO "events" VALUES('nightly',6,2,1005.0,'report','{"time": 200.0, "energy": 40000.0, "metric": 0.9, "current_epoch": 5, "overhead_time": 0.0, "overhead_energy": 0.0}');
INSERT INTO "events" VALUES('nightly',7,2,1005.0,'ended','{"reason": "ok", "converged": true}');
INSERT INTO "events" VALUES('nightly',8,3,1006.0,'begun','{"batch_size": 128, "cost_bound": 51426.772352880595}');
INSERT INTO "events" VALUES('nightly',9,3,1007.0,'report','{"time": 300.0, "energy": 60000.0, "metric": 0.9, "current_epoch": 5, "overhead_time": 0.0, "overhead_energy": 0.0}');
INSERT INTO "events" VALUES('nightly',10,3,1007.0,'ended','{"reason": "ok", "converged": true}');
INSERT INTO "events" VALUES('nightly',11,4,1008.0,'begun','{"batch_size": 32, "cost_bound": 52295.13617497923}');
CREATE TABLE jobs (
	job_id VARCHAR(400) NOT NULL, 
	spec TEXT NOT NULL, 
	seed TEXT NOT NULL, 
	created_s DOUBLE NOT NULL, 
	trials BIGINT NOT NULL, 
	events BIGINT NOT NULL, 
	released BIGINT NOT NULL, 
	PRIMARY KEY (job_id)
);
INSERT INTO "jobs" VALUES('nightly','{"max_power":300.0,"number_of_gpus":1,"gpu_model":"Tesla V100","job_id":"nightly","job_id_prefix":"nightly","batch_sizes":[16,32,64,128],"default_batch_size":64,"eta_knob":0.5,"beta_knob":2.0,"target_metric":0.5,"higher_is_better_metric":true,"max_epochs":10,"policy":"gp","window_size":0,"num_pruning_rounds":2,"mab_prior_mean":0.0,"mab_prior_precision":0.0,"mab_num_explorations":2,"mab_seed":1}','1',1001.0,4,11,0);
CREATE TABLE trials (
	job_id VARCHAR(400) NOT NULL, 
	number BIGINT NOT NULL, 
	"key" VARCHAR(200) NOT NULL, 
	batch_size BIGINT NOT NULL, 
	began_s DOUBLE NOT NULL, 
	heard_s DOUBLE NOT NULL, 
	lease_s DOUBLE, 
	cost_bound DOUBLE, 
	status VARCHAR(16) NOT NULL, 
	ended_s DOUBLE, 
	end_order BIGINT, 
	converged BOOLEAN NOT NULL, 
	stopped_by_cost BOOLEAN NOT NULL, 
	epochs BIGINT NOT NULL, 
	time DOUBLE NOT NULL, 
	energy DOUBLE NOT NULL, 
	overhead_time DOUBLE NOT NULL, 
	overhead_energy DOUBLE NOT NULL, 
	metric DOUBLE, 
	PRIMARY KEY (job_id, number), 
	CONSTRAINT trials_job_id_key UNIQUE (job_id, "key"), 
	FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
INSERT INTO "trials" VALUES('nightly',1,'key0',64,1002.0,1003.0,600.0,NULL,'ok',1003.0,3,1,0,5,100.0,20000.0,0.0,0.0,0.9);
INSERT INTO "trials" VALUES('nightly',2,'key1',16,1004.0,1005.0,600.0,50000.0,'ok',1005.0,6,1,0,5,200.0,40000.0,0.0,0.0,0.9);
INSERT INTO "trials" VALUES('nightly',3,'key2',128,1006.0,1007.0,600.0,5.14267723528805945553e+04,'ok',1007.0,9,1,0,5,300.0,60000.0,0.0,0.0,0.9);
INSERT INTO "trials" VALUES('nightly',4,'key3',32,1008.0,1008.0,600.0,5.22951361749792267797e+04,'running',NULL,NULL,0,0,0,0.0,0.0,0.0,0.0,NULL);
CREATE INDEX ix_trials_status ON trials (status);
COMMIT;
