package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"github.com/pingcap/tidb/pkg/util/codec"
)

// control answers what tests ask for, over HTTP:
//
//	POST /fault   a fault, as JSON: see faults.go
//	POST /clear   no more faults
//	POST /split   the region of the key in the body becomes two, the second beginning with it
//	POST /move    another store leads each region from now on
//	GET  /counts  how often each method was called, as JSON
func (sim *cluster) control() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /fault", func(w http.ResponseWriter, r *http.Request) {
		one := &fault{}
		if err := json.NewDecoder(r.Body).Decode(one); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		sim.faults.add(one)
	})
	mux.HandleFunc("POST /clear", func(http.ResponseWriter, *http.Request) { sim.faults.clear() })
	mux.HandleFunc("POST /move", func(http.ResponseWriter, *http.Request) { sim.moveLeaders() })
	mux.HandleFunc("POST /split", func(w http.ResponseWriter, r *http.Request) {
		key, err := io.ReadAll(r.Body)
		if err == nil {
			err = sim.split(key)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
		}
	})
	mux.HandleFunc("GET /counts", func(w http.ResponseWriter, _ *http.Request) {
		sim.faults.mu.Lock()
		defer sim.faults.mu.Unlock()
		json.NewEncoder(w).Encode(sim.faults.counts)
	})
	return mux
}

// split lets a new region begin with key; who led the old one leads both.
func (sim *cluster) split(key []byte) error {
	region, _, _, _ := sim.regions.GetRegionByKey(codec.EncodeBytes(nil, key))
	if region == nil {
		return fmt.Errorf("no region holds %q", key)
	}
	leader := sim.leader(region).StoreId
	id := sim.regions.AllocID()
	peers := sim.regions.AllocIDs(len(region.Peers))
	sim.mu.Lock()
	sim.leaders[id] = leader
	sim.mu.Unlock()
	sim.regions.Split(region.Id, id, key, peers, peers[0])
	return nil
}

// moveLeaders lets the other store lead each region.
func (sim *cluster) moveLeaders() {
	for _, region := range sim.regions.ScanRegions(nil, nil, 0) {
		now := sim.leader(region.Meta)
		for _, peer := range region.Meta.Peers {
			if peer.StoreId != now.StoreId {
				sim.mu.Lock()
				sim.leaders[region.Meta.Id] = peer.StoreId
				sim.mu.Unlock()
				break
			}
		}
	}
}
