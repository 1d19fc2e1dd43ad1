package realkubelet

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"sync"
	"testing"
)

// kinds are the kinds of what kubelet lists.
var kinds = map[string]string{
	"csidrivers":     "CSIDriver",
	"nodes":          "Node",
	"pods":           "Pod",
	"runtimeclasses": "RuntimeClass",
	"services":       "Service",
}

type object = map[string]any

// apiServer is as much of an API server as kubelet needs: objects can be read,
// listed and made; a watch never has news.
type apiServer struct {
	mu      sync.Mutex
	objects map[string]object // by path
}

// serveAPI serves until the test ends and returns the address. It has the
// RuntimeClasses and the node.
func serveAPI(t *testing.T, node string, runtimeClasses []string) string {
	t.Helper()
	s := &apiServer{objects: make(map[string]object)}
	s.put("/api/v1/nodes", object{
		"apiVersion": "v1", "kind": "Node", "metadata": object{"name": node, "uid": node},
		"status": object{
			"conditions":  []object{{"type": "Ready", "status": "True"}},
			"allocatable": object{"pods": "100", "cpu": "2", "memory": "1Gi"},
		},
	})
	for _, name := range runtimeClasses {
		s.put("/apis/node.k8s.io/v1/runtimeclasses", object{
			"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": object{"name": name}, "handler": name,
		})
	}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	// A watch goes on until its client is gone; kubelet was stopped by now.
	t.Cleanup(server.CloseClientConnections)
	return server.URL
}

func (s *apiServer) put(collection string, o object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	meta := o["metadata"].(object)
	meta["resourceVersion"] = "1"
	name, _ := meta["name"].(string)
	s.objects[path.Join(collection, name)] = o
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.URL.Query().Get("watch") != "":
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	case r.Method == http.MethodPost:
		var o object
		if err := json.NewDecoder(r.Body).Decode(&o); err != nil || o["metadata"] == nil {
			answer(w, http.StatusBadRequest, failure(http.StatusBadRequest, "BadRequest"))
			return
		}
		s.put(r.URL.Path, o)
		answer(w, http.StatusCreated, o)
	case r.Method == http.MethodGet && kinds[path.Base(r.URL.Path)] != "":
		answer(w, http.StatusOK, s.list(r.URL.Path))
	default: // a change of an object is heard and has no effect
		s.mu.Lock()
		o, ok := s.objects[r.URL.Path]
		if !ok {
			o, ok = s.objects[strings.TrimSuffix(r.URL.Path, "/status")]
		}
		s.mu.Unlock()
		if !ok {
			answer(w, http.StatusNotFound, failure(http.StatusNotFound, "NotFound"))
			return
		}
		answer(w, http.StatusOK, o)
	}
}

func (s *apiServer) list(collection string) object {
	s.mu.Lock()
	defer s.mu.Unlock()
	items := []object{}
	for name, o := range s.objects {
		if path.Dir(name) == collection {
			items = append(items, o)
		}
	}
	group := strings.Split(strings.TrimPrefix(collection, "/"), "/")
	version := group[1]
	if group[0] == "apis" {
		version += "/" + group[2]
	}
	return object{
		"apiVersion": version, "kind": kinds[path.Base(collection)] + "List",
		"metadata": object{"resourceVersion": "1"}, "items": items,
	}
}

func failure(code int, reason string) object {
	return object{"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason}
}

func answer(w http.ResponseWriter, code int, o object) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(o) // a client that is gone needs no answer
}
