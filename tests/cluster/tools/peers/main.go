// training-operator is Kubeflow's PyTorchJob controller, unchanged, as benchmarks/operator.py runs it.
//
// What its own command has around the controller is left out where a benchmark has no use for it: webhook and
// certificates, which no job here needs. What cannot be said to its own command can be said to this one: how many
// requests a second its client may make. Both defaults are those of the command that is released.
package main

import (
	"flag"
	"log"

	kubeflow "github.com/kubeflow/training-operator/pkg/apis/kubeflow.org/v1"
	"github.com/kubeflow/training-operator/pkg/config"
	"github.com/kubeflow/training-operator/pkg/controller.v1/common"
	"github.com/kubeflow/training-operator/pkg/controller.v1/pytorch"
	"k8s.io/apimachinery/pkg/runtime"
	clientgo "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

func main() {
	metrics := flag.String("metrics-bind-address", ":8080", "where the metrics are")
	namespace := flag.String("namespace", "", "the only namespace that is looked at")
	threads := flag.Int("controller-threads", 1, "jobs reconciled at once")
	perSecond := flag.Float64("qps", 20, "requests a second; negative: no limit")
	burst := flag.Int("burst", 30, "requests at once")
	flag.Parse()
	config.Config.PyTorchInitContainerImage = config.PyTorchInitContainerImageDefault
	config.Config.PyTorchInitContainerMaxTries = config.PyTorchInitContainerMaxTriesDefault
	ctrl.SetLogger(zap.New(zap.UseDevMode(true)))

	known := runtime.NewScheme()
	must(clientgo.AddToScheme(known))
	must(kubeflow.AddToScheme(known))
	client := ctrl.GetConfigOrDie()
	client.QPS, client.Burst = float32(*perSecond), *burst
	manager, err := ctrl.NewManager(client, ctrl.Options{
		Scheme:                 known,
		Metrics:                server.Options{BindAddress: *metrics},
		HealthProbeBindAddress: "0",
		Cache:                  cache.Options{DefaultNamespaces: map[string]cache.Config{*namespace: {}}},
	})
	must(err)
	must(pytorch.NewReconciler(manager, common.GenNonGangSchedulerSetupFunc()).SetupWithManager(manager, *threads))
	must(manager.Start(ctrl.SetupSignalHandler()))
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
